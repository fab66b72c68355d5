"""Search spaces of distributed Flash Decode: one module per variant; `attention` holds their shared parts."""
