"""What a project has; the test says where databases and broker are."""

from __future__ import annotations

import json
import os

if os.environ.get("SHOP_DRIVER") == "pymysql":
    import pymysql

    pymysql.install_as_MySQLdb()

DATABASES = json.loads(os.environ["SHOP_DATABASES"])
INSTALLED_APPS = [
    "django.contrib.admin", "django.contrib.auth", "django.contrib.contenttypes", "django.contrib.messages",
    "django.contrib.sessions", "txmq.django", "tests.services.django_app.shop",
]  # fmt: skip
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware", "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]  # fmt: skip
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request", "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]  # fmt: skip
TXMQ = {"BOOTSTRAP": os.environ.get("SHOP_BROKER", "txmq://127.0.0.1:1"), "NAME": "shop"}
MIGRATION_MODULES = {"txmq": None} if os.environ.get("SHOP_MIGRATIONS") == "none" else {}
ROOT_URLCONF = "tests.services.django_app.shop.views"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
STATIC_URL = "static/"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
ALLOWED_HOSTS = ["testserver"]
SECRET_KEY = "of a test"
USE_TZ = True
