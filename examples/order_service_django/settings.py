"""Django's settings; ORDERS_DB is an entry of DATABASES, as JSON."""

from __future__ import annotations

import json
import os

_LOCK_WAIT_S = int(os.environ.get("REQUEST_S", "10"))

DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "ATOMIC_REQUESTS": True,
        "OPTIONS": {"options": f"-c lock_timeout={_LOCK_WAIT_S}s"},
        **json.loads(os.environ["ORDERS_DB"]),
    }
}
INSTALLED_APPS = ["txmq.django", "examples.order_service_django"]
TXMQ = {
    "BOOTSTRAP": os.environ.get("TXMQ_BOOTSTRAP", "txmq://127.0.0.1:8123"), "NAME": "orders", "CODEC": "json",
}  # fmt: skip
MIDDLEWARE = ["examples.order_service_django.views.Refusals"]
ROOT_URLCONF = "examples.order_service_django.views"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
SECRET_KEY = os.environ.get("SECRET_KEY", "an-example's")
ALLOWED_HOSTS = ["*"]
USE_TZ = True
