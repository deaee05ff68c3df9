"""Text to packed batches: sources, formats and masks, the tokenization cache, packing, the resumable
loader."""
