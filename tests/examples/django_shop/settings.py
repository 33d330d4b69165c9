"""What a project has, and where the test says that the database and the broker are."""

from __future__ import annotations

import json
import os

DATABASES = {"default": {"ATOMIC_REQUESTS": True, **json.loads(os.environ["SHOP_DATABASE"])}}
BROKER = os.environ["SHOP_BROKER"]
INSTALLED_APPS = ["tests.examples.django_shop"]
ROOT_URLCONF = "tests.examples.django_shop.views"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
ALLOWED_HOSTS = ["testserver"]
SECRET_KEY = "of a test"
USE_TZ = True
