"""The phases of one step, one folder each, in this order::

backward        gradient packs (low precision, one view per parameter)
   │  reduce    pack by pack, last parameters first, during the backward
   ▼
own span of the mean gradient ──► decide: one small all-reduce: norm, skip, clip factor
   │
   ▼  update    unscale · clip · optimizer, on the own fp32 masters and moments
own span of the pack ◄── cast to bf16/fp16, in the same pass
   │
   ▼  sync      owners -> all ranks, on the current stream
packs: the model's parameters are views of them; the next forward reads them
"""
