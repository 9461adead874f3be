"""Cases of which the kernels are compiled for an H100, and the numbers compared with a CPU's."""

from __future__ import annotations

SMALL = [
    "model.dim=32", "model.n_layers=1", "model.n_heads=2", "model.vocab_size=96",
    "train.micro_batch=1", "train.seq_len=160", "train.precision=fp32", "train.clip_norm=null",
    "optim.type=adamw",
]  # fmt: skip
"""Keys of all cases. An interpreted kernel takes up to seconds, but FlexAttention's mask of up to
128 tokens would not be compiled."""
DOCUMENTS = ["data.mask_documents=true"]
WEIGHTS = "init.from=hf:any"

CASES = {
    **{
        name: [f"model.family={name}"]
        for name in ("gpt2", "llama", "qwen3", "phi3", "olmo2")
    },
    "qwen2": ["model.family=qwen2", "tokenizer.pre_tokenizer=qwen2"],
    "smollm3": ["model.family=smollm3", "model.n_layers=4"],  # the last one has no RoPE
    "mistral": ["model.family=mistral", "model.window=20"],
    # The last layer has no window.
    "olmo3": ["model.family=olmo3", "model.window=20", "model.n_layers=4", *DOCUMENTS],
    "gemma3": ["model.family=gemma3", "model.window=20", "model.logit_softcap=5", *DOCUMENTS],
    "documents": ["model.n_kv_heads=1", *DOCUMENTS],
    "chunks": [],
    "chunks-documents": DOCUMENTS,
    "z-loss": ["train.z_loss=0.01"],
    "remat-full": ["train.remat=full"],
    "remat-selective": ["train.remat=selective"],
    "remat-documents": ["train.remat=full", *DOCUMENTS],
    "adapter": ["adapter.type=lora", "adapter.rank=4", WEIGHTS],
    "dpo": [
        "objective.type=dpo", "data.type=preference", WEIGHTS, "tokenizer.type=file",
        "tokenizer.path=any",
    ],
    "muon": ["optim.type=muon"],
    "bf16": ["train.precision=bf16"],
    "bf16-documents": ["train.precision=bf16", *DOCUMENTS],
}  # fmt: skip
"""Keys by name. With `chunks`, this rank computes the chunks of two ranks that share a sequence."""
