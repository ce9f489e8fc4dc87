"""One strategy a file, or a folder; each edits a model in place and says what it sends, when, and how many bytes.

plan word       where                                what is sent
pp=4            pipeline/engine.py                   activations and their gradients, from stage to stage
dp=2            data.py, servers.py                  gradients, summed
zero=1,2,3      zero/stages.py                       gradients scattered, weights gathered
zero=3,shard=2  zero/choice.py                       the same in groups; across them the shard's gradient
tp=2            tensor.py                            activations, summed after every second matrix
sp=true         sequence.py                          the same sums as scatter and gather
cp=2            context/exchanges.py                 keys and values, or heads, or halos
ep=2            expert.py                            tokens to the ranks of their experts, and back
ep=4,node=2     expert.py                            the same within a machine, then between machines
recompute=true  recompute.py                         nothing: blocks run again in backward
loss=chunked    chunked_loss.py                      nothing: the logits are never held whole

optimizer=muon (of the recipe, not the plan): muon.py, products of cut matrices, summed over tp.

spec says how each parameter was cut, boxes where a part is in the whole one; finish is what ends every step: partial
sums, tied embedding, norm, clip.
"""
