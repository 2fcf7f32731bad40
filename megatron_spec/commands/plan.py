"""Plan of a run from configurations only: `finetune.py --dry-run`. No weights, no GPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from megatron_spec.base.placement import Stage, place
from megatron_spec.checkpoint.spec import read_spec, resolve
from megatron_spec.commands.checks import check_training
from megatron_spec.commands.runs import FinetuneRun
from megatron_spec.commands.runs.finetune import DEFAULT_LENGTH
from megatron_spec.config import (
    BaseConfig,
    DraftConfig,
    ObjectiveConfig,
    ParallelConfig,
    QuantConfig,
    TrainConfig,
    presets,
)
from megatron_spec.config.machine import H100
from megatron_spec.families import read_base_config
from megatron_spec.planning.draft_modules import check_draft_modules
from megatron_spec.planning.estimate import (  # fmt: skip
    GIB,
    Place,
    checkpoint_bytes,
    draft_parameters,
    draft_passes,
    end_parameters,
    flops_per_token,
    memory,
)
from megatron_spec.planning.paths import Paths, Setting


@dataclass(frozen=True)
class Cluster:
    """Machines of a planned run."""

    num_nodes: int = 1
    gpus_per_node: int = 8
    gpu_memory_gib: float = 80.0

    @property
    def world_size(self) -> int:
        """Processes, one per GPU."""
        return self.num_nodes * self.gpus_per_node


def architectures(load: str) -> tuple[BaseConfig, DraftConfig, QuantConfig | None]:
    """(base, draft) of a draft checkpoint, or of a folder with a base's config.json and the default EAGLE-3 draft."""
    folder = Path(load)
    if not (folder / "config.json").is_file():
        spec = read_spec(resolve(load))
        return spec.base.config, spec.draft, spec.quant
    base = read_base_config(folder)
    size = min(32000, base.vocab_size)
    return base, presets.eagle_config(base, "eagle3", {"draft_vocab_size": size}), None


def plan(run: FinetuneRun) -> str:
    """The layout, memory per rank, work and placement of a run with --dry-run, as text.

    Raises UserError for everything that the run would refuse before loading weights.
    """
    base, draft, quant = architectures(run.load)
    objective, S = presets.objective_for(draft, run.objective), row_length(run)
    check_training(run, base, draft, quant, objective, S)
    machines = {name: getattr(run, name) for name in ("num_nodes", "gpus_per_node", "gpu_memory_gib")}
    cluster = Cluster(**{name: value for name, value in machines.items() if value is not None})
    layout, paths = _layout(run.parallel, cluster, run.train), _paths(run, base, draft, quant, objective, S)
    stages = place(base.num_layers, run.parallel, draft.capture_layer_ids)
    offline = run.offline_data is not None
    places = [
        Place(
            base, draft, run.parallel, run.train, S, draft_passes(draft, objective), cluster.world_size, stage.count,
            offline, paths=paths, anchors=objective.anchors, stored=offline or run.feature_cache is not None,
        )
        for stage in stages
    ]  # fmt: skip
    return "\n".join([
        *_models(base, draft), "", *_layout_lines(layout, run.parallel, run.train, places[0]), "",
        *_placement(stages, layout, cluster), "", *_memory(places, cluster), "",
        *_work(base, draft, run.train, objective, S, cluster), "",
        "fast paths on an H100", *(f"  {line}" for line in paths.lines()),
    ])  # fmt: skip


def row_length(run: FinetuneRun) -> int:
    """Longest row in tokens: that of stored features, if they are there already."""
    if run.offline_data is not None and (Path(run.offline_data) / "manifest.json").is_file():
        from megatron_spec.commands import finetune_inputs  # imports torch

        return finetune_inputs.row_length(run)
    return run.seq_length or DEFAULT_LENGTH


def _paths(
    run: FinetuneRun, base: BaseConfig, draft: DraftConfig, quant: QuantConfig | None, objective: ObjectiveConfig,
    S: int,
) -> Paths:  # fmt: skip
    """The fast paths of the run on an H100. Raises UserError for those that were asked for and cannot run there."""
    wanted = tuple(name for name in ("base_fp8", "draft_fp8") if getattr(run, name))
    wanted += ("te_fp8",) if run.layers.recipe else ()
    if quant is not None and run.teacher == "original":
        quant = quant.without_base
    setting = Setting(
        H100, "bfloat16" if run.train.bf16 else "float32", run.parallel, None if run.offline_data else base, draft,
        objective, quant, run.layers, run.train.micro_batch_size * S, wanted,
        plain=run.plain, draft_transformer_engine=run.draft_transformer_impl == "transformer_engine",
        draft_fp8_recipe=run.draft_fp8_recipe, optimizer_impl=run.train.optimizer_impl,
    )  # fmt: skip
    check_draft_modules(setting, planned=True)
    paths = Paths(setting)
    paths.check()
    return paths


def _layout(parallel: ParallelConfig, cluster: Cluster, train: TrainConfig) -> SimpleNamespace:
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    cp = parallel.context_parallel_size
    parallel.check_world_size(cluster.world_size)
    dp = cluster.world_size // (tp * pp * cp)
    return SimpleNamespace(tp=tp, pp=pp, cp=cp, dp=dp, micro_batches=train.micro_batches(dp, pp))


def _models(base: BaseConfig, draft: DraftConfig) -> list[str]:
    whole = Place(base, draft, ParallelConfig(), TrainConfig(train_iters=1, bf16=True), 1, 1, 1, base.num_layers)
    weights = (memory(whole)["base layers"] + end_parameters(base) * 2) / 2
    captures = ", ".join(map(str, draft.capture_layer_ids)) or "none (the final state)"
    return [
        f"base   {base.family}, {weights / 1e9:.1f} B parameters, {base.num_layers} layers, hidden {base.hidden_size}, "
        f"vocabulary {base.vocab_size}",
        f"draft  {draft.algorithm}, {sum(draft_parameters(draft)) / 1e6:.0f} M parameters, draft vocabulary "
        f"{draft.draft_vocab_size}, captured layers {captures}",
    ]


def _layout_lines(layout: SimpleNamespace, parallel: ParallelConfig, train: TrainConfig, first: Place) -> list[str]:
    sequence = ", sequence parallel" if parallel.sequence_parallel else ""
    experts = f" x EP {parallel.expert_model_parallel_size}" if parallel.expert_model_parallel_size > 1 else ""
    lines = [
        f"layout of the base: TP {layout.tp}{sequence} x CP {layout.cp} x DP {layout.dp} x PP {layout.pp}{experts}",
        f"layout of the draft: TP {layout.tp}{sequence}, CP {layout.cp}, data parallel over the other "
        f"{layout.dp * layout.pp}",
        f"global batch {train.global_batch_size} = {layout.micro_batches} micro-batches of {train.micro_batch_size} on "
        f"each of {layout.dp * layout.pp} ranks; features of {first.features_ahead} held ahead",
    ]
    if layout.pp > 1 and not first.stored:
        n = first.features_ahead * layout.pp
        lines.append(f"pipeline of the base busy {100 * n / (n + layout.pp - 1):.0f} % ({n} micro-batches at a time)")
    return lines


def _placement(stages: list[Stage], layout: SimpleNamespace, cluster: Cluster) -> list[str]:
    """Ranks are numbered with TP innermost, then CP, DP, PP."""
    per_stage, per_node = layout.tp * layout.cp * layout.dp, cluster.gpus_per_node
    lines = ["stage  layers      captures (own / passing)      ranks          nodes"]
    for i, stage in enumerate(stages):
        first, last = i * per_stage, (i + 1) * per_stage - 1
        own = ",".join(map(str, stage.captures_own)) or "-"
        passing = ",".join(map(str, stage.captures_in)) or "-"
        lines.append(
            f"{i:>5}  {stage.first:>4}-{stage.first + stage.count - 1:<6} {own + ' / ' + passing:<29} "
            f"{first:>5}-{last:<8} {first // per_node}-{last // per_node}"
        )
    lines.append("rank = tp + TP * (cp + CP * (dp + DP * pp)); node = rank // GPUs of a node")
    for name, size in (("tensor", layout.tp), ("tensor and context", layout.tp * layout.cp)):
        if size > per_node or per_node % size:
            lines.append(f"WARNING: a {name} parallel group of {size} does not stay inside a node of {per_node} GPUs")
            break
    return lines


def _memory(places: list[Place], cluster: Cluster) -> list[str]:
    totals = [sum(memory(p).values()) for p in places]
    worst = max(range(len(places)), key=totals.__getitem__)
    lines = [f"memory of a rank, GiB (stage {worst}, the fullest; estimate of the peak)"]
    lines += [f"  {name:<20} {value / GIB:8.2f}" for name, value in memory(places[worst]).items()]
    total = totals[worst] / GIB
    lines.append(f"  {'sum':<20} {total:8.2f}  of {cluster.gpu_memory_gib:.0f}")
    more = places[worst]
    one = memory(more)["features"] / GIB
    lines.append(f"  of the features, each micro-batch held ahead takes {one / max(1, more.features_ahead):.2f}")
    if total > cluster.gpu_memory_gib:
        lines.append(
            "WARNING: this does not fit. More tensor or pipeline stages hold less of the base; --use-distributed-"
            "optimizer, a shorter --seq-length, --context-parallel-size or a smaller --features-ahead hold less of the "
            "rest"
        )
    return lines


def _work(
    base: BaseConfig, draft: DraftConfig, train: TrainConfig, objective: ObjectiveConfig, S: int, cluster: Cluster
) -> list[str]:
    work = flops_per_token(base, draft, S, draft_passes(draft, objective), objective.anchors)
    tokens = train.global_batch_size * S
    step = sum(work.values()) * tokens
    seconds = step / cluster.world_size / 400e12
    return [
        f"work of a token, GFLOP: base {work['base'] / 1e9:.1f}, draft {work['draft'] / 1e9:.1f} "
        f"({objective.ttt_steps} steps forward and backward, {S} tokens a row)",
        f"a step of {tokens} tokens: {step / 1e15:.2f} PFLOP, {step / cluster.world_size / 1e12:.0f} TFLOP a GPU; at "
        f"400 TFLOP/s a GPU {seconds:.2f} s, {tokens / seconds:.0f} tokens/s",
        *([f"{train.train_iters} steps: {train.train_iters * seconds / 3600:.1f} hours"] if train.train_iters else []),
        f"a checkpoint: {checkpoint_bytes(draft, train.bf16) / GIB:.2f} GiB (draft and optimizer)",
    ]
