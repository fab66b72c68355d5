"""What may vary in distributed Flash Decode: one module a variant, and what they share in `attention`."""
