"""Checkpoints, tokenizers and model architectures. Importing this package never imports torch.

Every service may use: ``store`` (find or fetch a checkpoint), ``config`` (its shape), ``tokenizer`` (text to ids and
back, chat templates). They read GGUF metadata (``gguf_file``) or the JSON files of a Hugging Face directory.

Engine processes also use: ``registry.load_model``, which reads tensors (``weights``), assembles a model's parameters
(``parameters``, ``quantized``) and creates the architecture (``llama``) behind the contract in ``base``.

A second architecture is one module like ``llama`` and one row in ``architectures``.
"""
