"""The inference engine: scheduler, executor loop, sampler, model runner, and the client of its process.

A request travels ``client`` -> (ZMQ) -> ``executor`` -> ``scheduler`` -> ``runner`` -> ``sampler`` -> back. One module
holds one concept; only ``runner``, ``sampler``, ``logits`` and ``process`` import torch.
"""
