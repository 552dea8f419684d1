"""Model families as pure functions over plain parameter trees, and everything that reads a Hugging Face checkpoint."""
