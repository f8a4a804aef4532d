"""Views of a result: terminal, HTML, JUnit, markdown, JSON and Chrome trace."""

__all__ = [
    "doctor_view",
    "finding",
    "json_view",
    "junit",
    "markdown",
    "page",
    "printable",
    "stderr",
    "stdout",
    "terminal",
    "text_layout",
    "trace",
    "views",
    "watch_display",
]
