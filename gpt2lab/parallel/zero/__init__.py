"""ZeRO: the data-parallel ranks share out what they would all hold alike (Rajbhandari et al. 2020).

choice    from a plan to a stage and its ranks
stages    the three stages, and owners of whole layers: what is gathered, reduced and freed, and when
flat      parameters as one padded flat buffer, of which each rank keeps a shard
costs     bytes held and sent, by formula, of data parallelism and ZeRO
"""
