"""Drawing token ids from logits at a temperature, by the rules of ``octavo.engine.sampling``, which
are the reference."""
