"""All Triton kernels. Import this package only where `planning.paths` selects a fast path."""
