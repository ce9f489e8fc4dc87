"""Mixture of experts on one rank: what takes the place of a block's MLP. Expert parallelism is `parallel/expert.py`.

mixture   the configuration, the routers, room and drops, losses, and a plain loop to compare with
rows      tokens as rows sorted by expert and back, in adjoint pairs
"""
