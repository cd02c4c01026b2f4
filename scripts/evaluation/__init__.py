"""Evaluation by EleutherAI's lm-evaluation-harness, in process.

It lives beside its script, on the top floor: the harness is an optional package (`pip install 'jaxserve[eval]'`), so
nothing that a server needs may import it."""
