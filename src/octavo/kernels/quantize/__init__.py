"""Activations that no product or norm has quantised as it wrote them: attention's output."""
