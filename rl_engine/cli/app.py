"""The commands and their options; each loads what it needs when it runs, so that help is fast."""

from __future__ import annotations

from typing import Annotated

import typer

from rl_engine.cli.output import Debug, Json, console, emit_json, guarded

__all__ = ["app"]

app = typer.Typer(
    name="rl-engine",
    help="GRPO losses whose bits do not depend on how the work was split.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.command()
@guarded
def info(as_json: Json = False, debug: Debug = False) -> None:
    """Show versions, devices and the registered backends."""
    from rl_engine.cli.info import gather_info, print_info

    found = gather_info()
    if as_json:
        emit_json(found)
    else:
        print_info(found, console())


@app.command()
@guarded
def explain(
    op: Annotated[str, typer.Option(help="logprob | loss")] = "logprob",
    role: Annotated[str, typer.Option(help="train | infer")] = "train",
    dtype: Annotated[str, typer.Option(help="Dtype of the logits: bf16 | fp16 | fp32")] = "bf16",
    vocab: Annotated[int, typer.Option(help="Real vocabulary size.")] = 151936,
    padded_vocab: Annotated[int | None, typer.Option(help="Columns of the logits over all ranks.")] = None,
    tp: Annotated[int, typer.Option(help="Vocabulary shards.")] = 1,
    dp: Annotated[int, typer.Option(help="Data-parallel ranks (loss).")] = 1,
    merge: Annotated[str | None, typer.Option(help="exact_words | max_sumexp_tiles | shard_lse")] = None,
    tiles: Annotated[int | None, typer.Option(help="Vocabulary tiles; asks for max_sumexp_tiles.")] = None,
    entropy: Annotated[bool, typer.Option("--entropy", help="Ask for the entropy too.")] = False,
    temperature: Annotated[float, typer.Option(help="The logits are divided by it.")] = 1.0,
    normalizer: Annotated[str, typer.Option(help="Token normalizer (loss).")] = "global_active_tokens",
    beta: Annotated[float, typer.Option(help="Weight of the KL term (loss).")] = 0.0,
    backend: Annotated[str, typer.Option(help="auto | production | reference | a backend id")] = "auto",
    platform: Annotated[str, typer.Option(help="cpu | cuda | rocm")] = "cpu",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show who would serve a contract, and every reason against the others. Exits 1 when nobody can."""
    from rl_engine.cli.explain import Request, print_report
    from rl_engine.cli.explain import explain as ask

    report = ask(
        Request(
            op=op,
            role=role,
            dtype=dtype,
            vocab=vocab,
            padded_vocab=padded_vocab,
            tp=tp,
            dp=dp,
            merge=merge,
            tiles=tiles,
            entropy=entropy,
            temperature=temperature,
            normalizer=normalizer,
            beta=beta,
            backend=backend,
            platform=platform,
        )
    )
    if as_json:
        emit_json(report.to_dict())
    else:
        print_report(report, console())
    if report.selected_backend is None:
        raise typer.Exit(1)
