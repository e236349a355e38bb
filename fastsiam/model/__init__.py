"""Building blocks of networks: backbones, heads, batch normalisation, losses and numerics."""
