"""Cold start: supervised fine-tuning on demonstrations."""
