"""What a model is: a spec of what varies, lowered to one flat list of stages."""
