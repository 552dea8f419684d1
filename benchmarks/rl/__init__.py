"""Training with an `LLM` as the sampler: two loops to copy, on the demo model.

grpo.py    GRPO on a rule-based reward
distill.py a student that learns a teacher's log-probabilities
groups.py  groups of samples next to vLLM's; group_worker.py runs one engine
updates.py times of weight updates
"""
