"""Problem families with worked solutions, and the verifiers that judge an answer."""
