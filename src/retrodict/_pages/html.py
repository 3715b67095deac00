"""HTML pages from jinja2 templates, in which every name is text."""

import base64
import hashlib
import re
from functools import cache
from importlib import resources
from typing import Any

NOT_TEXT = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
"""Control characters, direction marks, lone surrogates and noncharacters."""


def visible(text: str) -> str:
    """Return a text that can be displayed: spaces for white space, U+FFFD for other controls.

    Names come from files. A control character or a lone surrogate would break a page or a figure,
    and a direction mark would reverse the words after it.
    """
    return NOT_TEXT.sub(lambda match: " " if match[0].isspace() else "\ufffd", text)


def render_page(package: str, template: str, *, script: str = "", **context: Any) -> str:
    """Render a template of a package as one HTML file that loads nothing else.

    Values are escaped: a name that contains markup is shown as text. The page has a content
    security policy that allows its own script and images in data URLs, and nothing else.

    Args:
        package: the package whose folder `templates` holds the template and its style sheet. The
            base template is in this package.
        template: the file name of the template.
        script: the JavaScript of the page; the template reads it as `script`.
        **context: the variables of the template.

    Raises:
        ImportError: if jinja2 is not installed.
    """
    environment = _environment(package)
    sources = ["default-src 'none'", "style-src 'unsafe-inline'", "img-src data:"]
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        sources.append(f"script-src 'sha256-{digest}'")
    from markupsafe import Markup

    page = environment.get_template(template)
    return page.render(policy=Markup("; ".join(sources)), script=Markup(script), **context)


@cache
def _environment(package: str) -> Any:
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError as error:
        raise ImportError(
            "HTML reports need jinja2: pip install 'retrodict[cli]', or pip install jinja2."
        ) from error
    folders = [
        str(resources.files(name).joinpath("templates")) for name in (package, "retrodict._pages")
    ]
    loader = jinja2.FileSystemLoader(folders)
    environment = jinja2.Environment(
        loader=loader,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: _displayable(value, Markup),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    environment.filters["base64"] = lambda content: base64.b64encode(content).decode()
    environment.globals["asset"] = lambda name: Markup(loader.get_source(environment, name)[0])
    return environment


def _displayable(value: Any, markup: type) -> Any:
    """Return what a template prints for a value: markup as it is, other texts made visible."""
    return visible(value) if isinstance(value, str) and not isinstance(value, markup) else value
