"""Serving beside training: published forms, changes, folders and sleep.

::

    published    parameters in a quantized form: forms, kernels, encoding, shards
    changes      published values that have changed: shards, changes, patches
    publish      changes sent through a folder and applied to a model: folder, applying
    sleep        memory freed between steps: sleep

All of them publish masters through :meth:`.Shard.publish`.
"""
