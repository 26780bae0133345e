"""Checkpoints, tokenizers and model architectures. Importing this package never imports torch.

``store`` finds or fetches a checkpoint, ``config`` and ``tokenizer`` read it (every service may), and
``registry.load_model`` turns it into a :class:`~kvmesh.models.base.CausalLM` (engine processes only).
"""
