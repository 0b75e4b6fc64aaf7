"""The forward pass in torch: layers, rotary embedding, fused kernels, 4-bit weights."""
