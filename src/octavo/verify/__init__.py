"""Acceptance: what must hold, on the user's own hardware, before a candidate is trusted.

``problems`` makes synthetic rows and knows their exact answers; ``checks``, ``speed``, ``soak`` and
``model`` each ask one question of a candidate through the Backend contract; ``faults`` plants what
a check must find; ``run`` puts the questions in order; ``report`` writes the certificate. Import
what you use: most of it needs torch.
"""
