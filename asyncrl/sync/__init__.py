"""The weight stream: each published version, resharded from the learner's layout to each generator's.

layout ▸ plan (pure)      who holds what, who sends what
bucket ▸ transport        bytes between tensors and over channels
publisher ◂ subscriber    versions: snapshot, pin, send, acknowledge
digest ▸ checksum            whether what an engine runs on is what the learner published
"""
