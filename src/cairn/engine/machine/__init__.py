"""The machine: its BLAS, its memory and its allocator."""
