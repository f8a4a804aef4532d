from moediag import laws as laws
from moediag import verify as verify
from moediag.api import diagnose as diagnose
from moediag.lab.api import check as check
from moediag.lab.api import run as run

__version__: str
