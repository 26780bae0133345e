"""Checkpoints, tokenizers and model architectures. Importing this package never imports torch.

Every service may use: ``store`` (find or fetch a checkpoint), ``config`` (its shape), ``tokenizer`` (text to ids and
back, chat templates). They read GGUF metadata (``gguf_file``) or the JSON files of a Hugging Face directory.

Engine processes also use: ``registry.load_model``, which reads tensors (``weights``), assembles a model's parameters
(``parameters``, ``quantized``) and creates the architecture (``llama``, ``gemma2``, ``gemma3``) behind the contract in
``base``.

Another architecture is one module and one row in ``architectures``; ``decoder`` is the frame that the present ones
share.
"""
