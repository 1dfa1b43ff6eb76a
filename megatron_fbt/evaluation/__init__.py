"""Evaluation of exported models on tasks of EleutherAI's lm-eval (the extra `eval`), in one or several regimes."""
