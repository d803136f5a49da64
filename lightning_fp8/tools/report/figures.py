"""The charts of the page, drawn by plotly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_fp8.tools.report.charts import COLOURS, Chart, Line, as_numbers, curve_keys, curves, loss_keys
from lightning_fp8.tools.report.runs import Run
from lightning_fp8.tools.report.tensors import Tensors

_DASHES = ("solid", "dash", "dot")
_CONFIG = {"displaylogo": False, "modeBarButtonsToRemove": ["lasso2d", "select2d"]}
_TITLES = {
    "scale": ("log2 of the scale", ".4~g"),
    "headroom_bits": ("headroom, bits", ".3~g"),
    "saturated_fraction": ("saturated share", ".3~%"),
    "underflowed_fraction": ("underflowed share", ".3~%"),
}
Figure = dict[str, Any]


def drawn(figure: Figure, name: str) -> str:
    """A figure as HTML, in an element with the ID ``name``."""
    from plotly.io import to_html

    html = to_html(figure, config=_CONFIG, include_plotlyjs=False, full_html=False, validate=False, div_id=name)
    return str(html)


def line_chart(chart: Chart, height: int = 260) -> Figure:
    """Lines over steps, with marked steps."""
    number = {"tickformat": "~%", "hoverformat": ".3~%", "rangemode": "tozero"} if chart.is_share else {}
    layout = _layout(height, {**number, "type": "log" if chart.is_log else "linear", "automargin": True})
    line = {"type": "line", "yref": "paper", "y0": 0, "y1": 1}
    text = {"yref": "paper", "y": 1, "textangle": -90, "showarrow": False, "xanchor": "right", "yanchor": "top"}
    marks = [(one.step, {"color": _colour(one.colour), "width": 1, "dash": "dot"}) for one in chart.switches]
    layout["shapes"] = [{**line, "x0": step, "x1": step, "line": style} for step, style in marks]
    layout["annotations"] = [{**text, "x": one.step, "text": _plain(one.label)} for one in chart.switches]
    return {"data": _traces(chart.lines), "layout": layout}


def curve_chart(runs: Sequence[Run]) -> Figure | None:
    """The user's metrics, of which a menu chooses; the losses at first. None if there are none."""
    keys = curve_keys(runs)
    losses = loss_keys(keys)
    choices = [losses, *([key] for key in keys if [key] != losses)]
    charts = [curves(runs, choice) for choice in choices if choice]
    if not charts:
        return None
    figure = line_chart(charts[0], 420)
    counts = [len(chart.lines) for chart in charts]
    figure["data"] = [{**one, "visible": chart is charts[0]} for chart in charts for one in _traces(chart.lines)]
    buttons = [
        _button(chart.title, "restyle", {"visible": np.repeat(np.arange(len(charts)) == number, counts).tolist()})
        for number, chart in enumerate(charts)
    ]
    scales = [_button(name, "relayout", {"yaxis.type": name}) for name in ("linear", "log")]
    # the menus are above the axes, so the legend is below
    figure["layout"] |= {"updatemenus": [_menu(scales, x=1, xanchor="right"), _menu(buttons)]}
    figure["layout"]["legend"] = {"orientation": "h", "y": -0.15, "yanchor": "top", "x": 0}
    return figure


def heat_map(tensors: Tensors) -> Figure:
    """The quantities of all tensors over steps: inputs, weights, gradients; a menu chooses the quantity."""
    names, planes = tensors.lines
    with np.errstate(divide="ignore", invalid="ignore"):
        planes = {**planes, "scale": np.log2(planes["scale"])}
    steps = tensors.steps[tensors.bounds[0]].tolist()
    data = [
        {
            **{"type": "heatmap", "visible": plane == "scale", "colorscale": "Viridis", "hoverongaps": False},
            **{"x": steps, "y": [_plain(name) for name in names], "z": [as_numbers(row, 4) for row in planes[plane]]},
            "hovertemplate": f"%{{y}}<br>step %{{x}}: %{{z:{form}}}<extra></extra>",
            "colorbar": {"thickness": 10, "outlinewidth": 0, "tickformat": "~%" if "%" in form else ""},
        }
        for plane, (_, form) in _TITLES.items()
    ]
    buttons = [
        _button(title, "restyle", {"visible": [plane == other for other in _TITLES]})
        for plane, (title, _) in _TITLES.items()
    ]
    height = min(max(16 * len(names), 160), 1000) + 110
    yaxis = {"autorange": "reversed", "automargin": True, "showgrid": False, "tickfont": {"size": 10}}
    return {"data": data, "layout": {**_layout(height, yaxis), "hovermode": "closest", "updatemenus": [_menu(buttons)]}}


def _traces(lines: Sequence[Line]) -> list[Figure]:
    # the worst tensor of a role is told by its dots, beside the median
    solid = {one.colour for one in lines if one.style == 0}
    return [
        {
            **{"type": "scatter", "name": _plain(one.name), "x": one.steps, "y": one.values},
            "mode": "lines+markers" if len(one.steps) < 20 else "lines",
            "line": {"color": _colour(one.colour), "dash": _DASHES[one.style % len(_DASHES)], "width": 2},
            "showlegend": one.style < 2 or one.colour not in solid,
        }
        for one in lines
    ]


def _layout(height: int, yaxis: Figure) -> Figure:
    # the style sheet gives the colours of texts and grids, in light and in dark
    return {
        "height": height,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 12},
        "margin": {"l": 50, "r": 12, "t": 40, "b": 40},
        "showlegend": True,
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "hovermode": "x unified",
        "hoverlabel": {"namelength": -1},
        "xaxis": {"title": {"text": "step", "standoff": 6}, "tickformat": ",d", "automargin": True},
        "yaxis": yaxis,
    }


def _menu(buttons: list[Figure], **place: Any) -> Figure:
    above = {"x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "pad": {"b": 8}, "borderwidth": 1}
    return {"buttons": buttons, "direction": "down", **above, **place}


def _button(title: str, method: str, change: Figure) -> Figure:
    return {"label": _plain(title), "method": method, "args": [change]}


def _colour(position: int) -> str:
    return COLOURS[position % len(COLOURS)]


def _plain(text: str) -> str:
    """Text without the markup that plotly interprets."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
