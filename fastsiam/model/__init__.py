"""The networks that are trained: backbones, heads, batch normalisation, losses."""
