"""The commands and their options; each loads what it needs when it runs, so that help is fast."""

from __future__ import annotations

from pathlib import Path
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


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"rl-engine {version('rl-engine')}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """GRPO losses whose bits do not depend on how the work was split."""


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


@app.command()
@guarded
def verify(
    file: Annotated[
        Path | None,
        typer.Argument(help="A batch that LossBatch.save wrote; one is generated where left out."),
    ] = None,
    tp: Annotated[str, typer.Option(help="TP degrees, between commas.")] = "1,2,4",
    dp: Annotated[str, typer.Option(help="DP degrees, between commas.")] = "1,2,4",
    dtype: Annotated[str, typer.Option(help="Dtype of generated logits: bf16 | fp16 | fp32")] = "bf16",
    vocab: Annotated[int, typer.Option(help="Real vocabulary of a generated batch.")] = 2039,
    padded_vocab: Annotated[
        int | None, typer.Option(help="Its columns; a multiple of 64 by default.")
    ] = None,
    seqs: Annotated[int, typer.Option(help="Its sequences, in groups of 4, 5, 3, 4, …")] = 12,
    length: Annotated[int, typer.Option("--len", help="Its token slots a sequence.")] = 24,
    seed: Annotated[int, typer.Option(help="Its seed.")] = 0,
    beta: Annotated[float | None, typer.Option(help="Weight of the KL term; 0 and 0.04 by default.")] = None,
    normalizer: Annotated[
        str | None, typer.Option(help="Token normalizer; the token mean and the sequence mean by default.")
    ] = None,
    backend: Annotated[
        str, typer.Option(help="auto | exact_torch | tiled | naive | another policy or backend id")
    ] = "auto",
    device: Annotated[str, typer.Option(help="auto | cpu | cuda")] = "auto",
    even: Annotated[
        bool, typer.Option("--even", help="Equal vocabulary shards rather than odd ones.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds for one layout.")] = 600.0,
    html: Annotated[Path | None, typer.Option(help="Write a page with the matrix and a plot.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compute one batch on many layouts of real ranks and compare every bit. Exits 1 where one differs."""
    from rl_engine.cli.verify import Options, progress_bar
    from rl_engine.cli.verify import verify as run

    options = Options(
        file=file,
        tp=tp,
        dp=dp,
        dtype=dtype,
        vocab=vocab,
        padded_vocab=padded_vocab,
        seqs=seqs,
        length=length,
        seed=seed,
        beta=beta,
        normalizer=normalizer,
        backend=backend,
        device=device,
        even=even,
        timeout=timeout,
        html=html,
    )
    with progress_bar(console(stderr=True)) as progress:
        report = run(options, progress)
    if as_json:
        emit_json(report.to_dict())
    else:
        out = console()
        report.print(out)
        if html is not None:
            out.print(f"page: {html}", style="dim")
    if not report.ok:
        raise typer.Exit(1)


@app.command()
@guarded
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the rollouts.")] = Path("out/demo"),
    samples: Annotated[int, typer.Option(min=2, help="Completions of each of the four questions.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=4, help="The most tokens of a completion.")] = 24,
    steps: Annotated[int, typer.Option(min=0, help="GRPO steps.")] = 5,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """GRPO on a real model: rollouts, the loss on six layouts, then training. Exits 1 where bits differ."""
    from rl_engine.cli.demo.run import DemoOptions, run_demo

    options = DemoOptions(out=out, samples=samples, max_tokens=max_tokens, steps=steps, seed=seed)
    report = run_demo(options, console(quiet=as_json), console(stderr=True))
    if as_json:
        emit_json(report.to_dict())
    if not report.ok:
        raise typer.Exit(1)
