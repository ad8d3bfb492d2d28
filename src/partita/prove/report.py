"""Reports as plain data, for ``--json``.  Bytes and counts are integers, times seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from partita.facts.case import Case
from partita.facts.ledger import row_json
from partita.plan.laws import Finding
from partita.prove.prove import Report
from partita.prove.reconcile import Table
from partita.prove.witness import Witness


def as_json(reports: Sequence[Report], assumed: dict[str, str] | None = None) -> dict[str, Any]:
    """The whole proof: one verdict, and everything of each layout."""
    agrees = all(r.verdict == "agrees" for r in reports)
    return {
        "verdict": "agrees" if agrees else "disagrees",
        "assumed": assumed or {},
        "layouts": [layout_json(r) for r in reports],
    }


def layout_json(report: Report) -> dict[str, Any]:
    case = report.account.case
    return {
        "layout": str(case.layout),
        "verdict": report.verdict,
        "reasons": list(report.reasons),
        "witnesses": list(report.witnesses),
        "stand_ins": list(report.stand_ins),
        "work": work_json(case),
        "divided": [row_json(g) for g in report.account.ledger.gradients],
        **table_json(report.table),
        "differences": {name: d.json() for name, d in report.differences.items()},
        "losses": list(report.losses),
        "step_time_s": report.step_time.json() if report.step_time else None,
        "laws": [law_json(f) for f in report.laws],
        "seconds": report.seconds,
    }


def work_json(case: Case) -> dict[str, Any]:
    work = case.work
    return {
        "model": case.model.name,
        "parameters": case.model.parameter_count,
        "ranks": case.mesh.world,
        "global_batch": work.global_batch,
        "sequence": work.sequence,
        "micro_batches": case.micro_batches,
        "precision": work.precision.name,
        "optimizer": work.optimizer,
    }


def table_json(table: Table) -> dict[str, Any]:
    return {
        "traffic": [t.json() for t in table.traffic],
        "memory": [m.json() for m in table.memory],
        "peaks": [p.json() for p in table.peaks],
    }


def law_json(finding: Finding) -> dict[str, Any]:
    return {"law": finding.law, "name": finding.name, "holds": finding.holds, "says": finding.says}


def dry_json(case: Case, table: Table, witnesses: Sequence[Witness], assumed: dict[str, str]) -> dict[str, Any]:
    """A dry run beside the arithmetic."""
    return {
        "verdict": "disagrees" if table.clashes else "agrees",
        "layout": str(case.layout),
        "assumed": assumed,
        "work": work_json(case),
        "ranks": [w.rank for w in witnesses],
        "stand_ins": list(dict.fromkeys(n for w in witnesses for n in w.stand_ins)),
        **table_json(table),
        "seconds": [w.seconds for w in witnesses],
    }
