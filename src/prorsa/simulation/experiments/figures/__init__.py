"""Every figure and table of the paper's evaluation: which runs it needs, and what it says of them.

Nothing is claimed that the runs do not show: verdicts come from `verdicts`, and every sentence about a result is chosen by
the result.
"""

from __future__ import annotations

from prorsa.simulation.experiments import paper
from prorsa.simulation.experiments.figures.characterisation import fig1, fig2, fig2_jobs, fig3
from prorsa.simulation.experiments.figures.common import Figure, long_jobs
from prorsa.simulation.experiments.figures.forecasting import fig8, fig8_jobs, fig9
from prorsa.simulation.experiments.figures.performance import (
    fig5,
    fig5_jobs,
    fig5_later,
    fig6,
    fig6_jobs,
    table2,
    table2_jobs,
)
from prorsa.simulation.experiments.figures.switching import (
    doubled,
    doubled_jobs,
    fig7,
    fig7_jobs,
    switch,
    switch_jobs,
)
from prorsa.simulation.experiments.figures.throughput import table1
from prorsa.simulation.experiments.sensitivity import sensitivity_jobs, sensitivity_section

FIGURES = (
    Figure("fig1", long_jobs(paper.TASKS, paper.STALENESS), fig1),
    Figure("fig2", fig2_jobs, fig2),
    Figure("fig3", long_jobs(paper.AGENTIC, paper.STALENESS), fig3),
    Figure("fig5", lambda lab: fig5_jobs(lab) + sensitivity_jobs(lab), fig5, fig5_later),
    Figure("fig6", lambda lab: fig6_jobs(lab) + sensitivity_jobs(lab), fig6),
    Figure("fig7", fig7_jobs, fig7),
    Figure("doubled", doubled_jobs, doubled),
    Figure("fig8", fig8_jobs, fig8),
    Figure("fig9", fig8_jobs, fig9),
    Figure("table1", lambda lab: [], table1),
    Figure("table2", lambda lab: table2_jobs(lab) + switch_jobs(lab) + sensitivity_jobs(lab), table2),
    Figure("switch", switch_jobs, switch),
    Figure("sensitivity", sensitivity_jobs, sensitivity_section),
)
