"""The starting checkpoint: tokenizer, architecture, initialisation, import of foreign checkpoints."""
