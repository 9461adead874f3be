"""The command `dtt chat`."""

from __future__ import annotations

from typing import Annotated

from dtt.cli.app import cli
from dtt.cli.options import Ema, MaxNewTokens, Model, Port, Seed, Temperature, TopK, TopP, option


@cli.command(
    "dtt chat jobs/assistant",
    'dtt chat jobs/assistant --system "Answer in one sentence." --temperature 0',
    "dtt chat exports/assistant < questions.txt                # one user message per line",
    "dtt chat jobs/assistant --json --ids < conversations.jsonl",
    "dtt chat jobs/assistant --web                             # a page, and OpenAI's API",
)
def chat(
    source: Model,
    system: Annotated[str, option("System prompt.")] = "",
    template: Annotated[
        str | None,
        option("Chat template (chatml, or a Jinja file) to use instead of the model's own."),
    ] = None,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = None,
    ema: Ema = False,
    ids: Annotated[bool, option("--ids", "Print the token ids of each prompt.")] = False,
    json: Annotated[bool, option("--json", "Print one JSON object per answer.")] = False,
    web: Annotated[
        bool, option("--web", "Serve a page and OpenAI's API on 127.0.0.1 instead.")
    ] = False,
    port: Port = 0,
) -> None:
    """Converse with a model that was trained on conversations.

    Renders prompts as in training, streams the answers, and ends them at the trained stop tokens.
    Reads messages from the terminal, or from stdin one per line. With --json, lines of stdin that
    start with { or [ are JSON: {"role": …, "content": …} continues the conversation, {"messages":
    […]} starts a new one. If the context is full, the oldest turns are dropped.

    With --web, the printed address opens a page, and other programs use /v1/chat/completions and
    /v1/completions; the options are their defaults. The server refuses every request without the
    random token of the address. A model without a chat template continues texts.
    """
    from dtt.base.errors import ConfigError
    from dtt.generate.run import choose_sampling

    if web and (json or ids):
        raise ConfigError("--web and --json or --ids are mutually exclusive")
    sampling = choose_sampling(source, max_new_tokens, temperature, top_k, top_p, seed)
    if web:
        from dtt.generate import web as body

        body.run(source, system, sampling, template=template, ema=ema, port=port)
        return
    from dtt.generate import chat

    chat.run(source, system, sampling, template=template, ema=ema, show_ids=ids, as_json=json)
