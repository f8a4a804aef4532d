from moediag import laws as laws
from moediag import verify as verify
from moediag.api import check as check
from moediag.api import diagnose as diagnose
from moediag.api import run as run

__version__: str
