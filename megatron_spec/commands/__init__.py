"""One function per script of the chain: convert, finetune, quantize, export, validate, generate, extract features."""
