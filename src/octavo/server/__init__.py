"""The server: OpenAI's protocol over HTTP in one process, the engine in another.

``serve`` starts, watches and stops both. Text lives on this side, in ``frontend``; the engine is
given ids and gives ids (``messages``). Requests come in through ``app`` (access, caps, routes), are
read strictly by ``protocol`` and leave as JSON or as a stream of events (``answers``).
"""
