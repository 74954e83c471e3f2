"""Memory: how a step is squeezed, and what it really takes."""
