"""`dtt download`: fetch raw documents into a corpus folder."""

from __future__ import annotations

from dtt.config.run import RunConfig


def run(cfg: RunConfig) -> None:
    """Create each corpus that the `download` section describes, and print a summary."""
    for one in cfg.corpora:
        _download(one)


def _download(cfg: RunConfig) -> None:
    from dtt.data.corpus.download import download

    out = cfg.corpus_dir
    manifest = download(cfg.download, out, rows=cfg.data.has_conversations)
    source = manifest.source
    column = manifest.text_column
    documents = manifest.txt_documents or (f"column {column}" if column else "conversations")
    size = sum(file.bytes for file in manifest.files)
    print(f"corpus  {out}")
    print(f"source  {source.id}" + (f" at {source.revision}" if source.revision else ""))
    print(f"files   {len(manifest.files)} {manifest.file_format}, {size / 1e6:.1f} MB")
    print(f"text    {documents}")
