"""Reading memory and nothing else: the bandwidth that attention is measured against."""
