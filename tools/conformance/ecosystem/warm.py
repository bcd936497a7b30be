"""Preloaded by the process from which worlds are forked: these packages import slowly."""

import importlib
import warnings

MODULES = """
without_vllm
accelerate diffusers lightning.pytorch pytest sentence_transformers timm torch._dynamo torchao.optim
diffusers.models.unets.unet_2d diffusers.models.unets.unet_2d_condition diffusers.training_utils
transformers.trainer transformers.models.bert.modeling_bert transformers.models.clip.modeling_clip
transformers.models.llama.modeling_llama trl.trainer.dpo_trainer trl.trainer.grpo_trainer
trl.trainer.reward_trainer trl.trainer.sft_trainer peft datasets
shardcast.accelerate shardcast.lightning shardcast.transformers shardcast.testing
frameworks loops mistakes optimizers patterns published resuming trainers
"""

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for name in MODULES.split():
        importlib.import_module(name)
