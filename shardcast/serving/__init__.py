"""Parts for a job that trains and serves one model: forms, changes, folders, and sleep.

::

    published    parameters on the grid of a quantized form: forms, kernels, blocks, wire, shards
    changes      which published values have changed: records, changes, patches
    publish      changes through a folder, applied to a model: folder, applying
    sleep        the memory between steps: sleep, sleeping

All of it publishes masters by one place, :meth:`.Shard.publish`, and has its options and calls.
"""
