"""The decoder-only transformer: RMSNorm, RoPE, grouped-query attention, SwiGLU, dense or mixture of experts."""
