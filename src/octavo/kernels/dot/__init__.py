"""8-bit dot products and nothing else: the rate that quantised products are measured against."""
