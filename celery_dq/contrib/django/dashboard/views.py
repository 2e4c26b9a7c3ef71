"""The base of all pages and changes: permissions, CSRF, headers, HTML or JSON, and confirmation."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from django.apps import apps
from django.core import signing
from django.http import HttpRequest, HttpResponse, HttpResponseBase, HttpResponseRedirect, QueryDict
from django.template.loader import render_to_string
from django.utils.decorators import method_decorator
from django.views.decorators.csrf import csrf_protect
from django.views.generic import View

from celery_dq.app.api.api import DQ, dq_of
from celery_dq.contrib.django.apps import project_app
from celery_dq.contrib.django.dashboard.access import PERMISSIONS, VIEW_ARGUMENTS, VIEW_QUEUES, may
from celery_dq.contrib.django.dashboard.broker_reads import BrokerReads, Failure, failure_of
from celery_dq.contrib.django.dashboard.links import link_to
from celery_dq.errors import DQError, InvalidRequest
from celery_dq.inspector.redis_values import check_text
from celery_dq.shown import plain, shown_logger

logger = shown_logger(__name__)

#: Version of the JSON documents. A field may be added without a new version.
JSON_VERSION = 1
#: Values of the parameter ``format``; the first one is the default.
FORMATS = ("html", "json")
#: Salt of signed notices, and the seconds for which one is shown.
NOTICE, NOTICE_S = "celery_dq.notice", 60
#: Characters of the reason of a change.
LONGEST_REASON = 200

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def required(given: QueryDict, name: str) -> str:
    """Return a parameter that must be there.

    Raises:
        InvalidRequest: It is missing or no text.
    """
    return check_text(name, given.get(name, ""))


class DashboardView(View):
    """A view with a permission. Its answers have strict headers, failures included.

    Attributes:
        permission: The permission that a request needs.
        section: The entry of the navigation that is highlighted.
    """

    permission: ClassVar[str] = VIEW_QUEUES
    section: ClassVar[str] = "queues"

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        """Answer, and set the headers."""
        response = self._answer(request, *args, **kwargs)
        for name, value in HEADERS.items():
            response[name] = value
        return response

    def _answer(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        try:
            refused = self._refusal()
            if refused is not None:
                return refused
            wanted = request.GET.get("format", FORMATS[0])
            if wanted not in FORMATS:
                raise InvalidRequest(f"format = {wanted!r} is not known: give one of {', '.join(FORMATS)}")
            return super().dispatch(request, *args, **kwargs)
        except Exception as exc:
            failure = failure_of(exc)
            if failure is None:
                raise
            return self.failed(failure)

    def _refusal(self) -> HttpResponseBase | None:
        """Return the refusal if the user lacks a permission; None if the user has all of them."""
        missing = [each for each in dict.fromkeys((VIEW_QUEUES, self.permission)) if not self._may(each)]
        if not missing:
            return None
        user: Any = self.request.user
        if not user.is_authenticated and not self._wants_json:
            # The import needs the models of django.contrib.auth, which ``celery dq web`` has not.
            from django.contrib.auth.views import redirect_to_login

            return redirect_to_login(self.way_back)
        named = " and ".join(f"celery_dq.{each} ({dict(PERMISSIONS)[each]})" for each in missing)
        needs = f"This needs the permission {named}"
        remedy = "Ask an administrator of the project for it."
        return self.failed(Failure(403, "Not allowed", needs, remedy))

    def refuse_unknown_queue(self, dq: DQ, given: QueryDict) -> None:
        """Refuse the name of a queue that does not exist. It reads the broker, so it runs in a thread.

        Raises:
            InvalidRequest: There is no such queue.
        """
        name = given.get("queue", "")
        known = dq.dedup if self.section == "dedup" else dq.queues  # the former has those of other brokers
        if name and name not in known:
            raise InvalidRequest(f"There is no queue {name!r}")

    def _may(self, permission: str) -> bool:
        return may(self.request, permission)

    @property
    def way_back(self) -> str:
        """The address that a failure leads to."""
        return self.request.get_full_path()

    @property
    def dq(self) -> DQ:
        """``app.dq`` of the project."""
        return dq_of(project_app())

    @property
    def reads(self) -> BrokerReads:
        """The reads of this process."""
        config: Any = apps.get_app_config("celery_dq")
        reads: BrokerReads = config.reads.get()
        return reads

    @property
    def read_only(self) -> bool:
        """Whether no change is allowed to any user."""
        return self.dq.options.web.read_only

    @property
    def shows_arguments(self) -> bool:
        """Whether the user may see the arguments of tasks."""
        return self.dq.options.web.show_arguments and self._may(VIEW_ARGUMENTS)

    @property
    def _wants_json(self) -> bool:
        return self.request.GET.get("format") == "json"

    def failed(self, failure: Failure) -> HttpResponse:
        """Return the page of a failure."""
        return self.rendered("failure", {"failure": failure}, failure.status, way_back=self.way_back)

    def rendered(self, page: str, data: Mapping[str, Any], status: int = 200, **more: Any) -> HttpResponse:
        """Return a page as HTML or, if the request asks for it, as JSON.

        Args:
            page: Name of the template.
            data: Variables of the template, and the JSON document.
            status: HTTP status.
            more: Further variables of the template.
        """
        may_view = self._may(VIEW_QUEUES)
        try:
            options = self.dq.options
            environment, prefix, read_only = options.environment, options.key_prefix, options.web.read_only
        except DQError:  # the failure that is shown
            environment, prefix, read_only = "", "", True
        if not may_view:
            environment, prefix, read_only = "", "", True
        if self._wants_json:
            document = {
                "version": JSON_VERSION,
                "environment": environment,
                "page": page,
                **plain(dict(data)),
            }
            return HttpResponse(
                json.dumps(_finite(document), allow_nan=False, default=str),
                content_type="application/json",
                status=status,
            )
        allowed = {codename: not read_only and self._may(codename) for codename, _ in PERMISSIONS}
        chrome = {
            "page": page,
            "section": self.section,
            "environment": environment,
            "key_prefix": prefix,
            "read_only": read_only,
            "shows_arguments": bool(environment) and self.shows_arguments,
            "may": allowed,
            "may_view": may_view,
            "is_get": self.request.method in ("GET", "HEAD"),
            "notice": self._notice,
            "undo": self.request.GET.get("undo", ""),
            "query": self.request.GET,
        }
        text = render_to_string(f"celery_dq/{page}.html", {**data, **chrome, **more}, request=self.request)
        # Names that are not valid Unicode hold surrogates.
        return HttpResponse(text.encode("utf-8", "backslashreplace"), status=status)

    @property
    def _notice(self) -> str:
        """The sentence about the last change. It is signed, so that a link cannot put words on the page."""
        try:
            return str(signing.loads(self.request.GET.get("notice", ""), salt=NOTICE, max_age=NOTICE_S))
        except signing.BadSignature:
            return ""


class NotFoundView(DashboardView):
    """The answer to an unknown address, where the dashboard has the whole server.

    It changes nothing, so a POST needs no CSRF token.
    """

    def _refusal(self) -> HttpResponseBase | None:
        refused = super()._refusal()
        if refused is not None:
            return refused
        reason = f"The dashboard has no page at {self.request.path}"
        return self.failed(Failure(404, "No such page", reason, "The navigation above leads to its pages."))


@method_decorator(csrf_protect, name="_answer")
class PageView(DashboardView):
    """A page that shows data.

    Attributes:
        page: Name of its template and of its JSON document.
    """

    http_method_names = ["get", "head", "options"]  # noqa: RUF012 - as Django declares it
    page: ClassVar[str]

    def read(self, dq: DQ, given: QueryDict, *, arguments: bool) -> dict[str, Any]:
        """Return the data of the page. It runs in a thread, and serves all viewers for a second.

        Args:
            dq: ``app.dq``.
            given: Parameters of the request.
            arguments: Whether the data may hold arguments of tasks.
        """
        raise NotImplementedError

    def get(self, request: HttpRequest) -> HttpResponse:
        """Show the page."""
        dq, arguments, given = self.dq, self.shows_arguments, request.GET.copy()
        for name in ("format", "notice", "undo"):
            given.pop(name, None)
        key = (self.page, given.urlencode(), arguments)

        def read() -> dict[str, Any]:
            self.refuse_unknown_queue(dq, given)
            return self.read(dq, given, arguments=arguments)

        data = self.reads.get(key, read)
        self.shown(dq, data)
        return self.rendered(self.page, data)

    def shown(self, dq: DQ, data: Mapping[str, Any]) -> None:
        """React to a look at the page. By default nothing happens."""


@dataclass(frozen=True)
class Confirmation:
    """The preview of a change, which the user confirms.

    Attributes:
        title: The change in a few words.
        sentence: The effect of the change.
        button: Text of the button.
        columns: Headings of `rows`.
        rows: The things that change.
        count: Number of these things, if it is more than `rows` has.
        fields: Values of the form that are sent with the confirmation.
        is_dangerous: Whether the change cannot be undone.
        rate_of: The unit of a rate that the user may give; "" asks for none.
        page: Name of the page that makes the change; "" is the one that has asked.
    """

    title: str
    sentence: str
    button: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    count: int = 0
    fields: Mapping[str, str] = field(default_factory=dict)
    is_dangerous: bool = False
    rate_of: str = ""
    page: str = ""

    @property
    def path(self) -> str:
        """The name of the address that makes the change."""
        return f"celery_dq:{self.page}"


@method_decorator(csrf_protect, name="post")  # the other refusals come before it
class ChangeView(DashboardView):
    """A change. Without ``confirmed`` in the form, the answer is a preview.

    Attributes:
        follows: Name of the page that follows, and the fields of the form that are its parameters.
        arguments: Whether the user may see the arguments of tasks.
        undo: Signed text with which the page that follows undoes the change; None if it cannot.
    """

    follows: ClassVar[tuple[str, ...]]
    arguments = False
    undo: str | None = None
    http_method_names = ["post", "options"]  # noqa: RUF012 - as Django declares it

    def preview(self, dq: DQ, form: QueryDict) -> Confirmation | None:
        """Return the question to the user; None for a change that is made at once. Runs in a thread."""
        return None

    def make(self, dq: DQ, form: QueryDict) -> str:
        """Make the change, and return a sentence about it. Runs in a thread."""
        raise NotImplementedError

    def back(self, form: QueryDict) -> tuple[str, dict[str, str]]:
        """Return name and parameters of the page that follows."""
        page, *names = self.follows
        return page, {name: form.get(name, "") for name in names}

    @property
    def way_back(self) -> str:
        """The page that has the form: the address of a change answers no GET."""
        page, query = self.back(self.request.POST)
        return link_to(page, **query)

    def _refusal(self) -> HttpResponseBase | None:
        if self.request.method == "POST" and self.read_only:
            reason = "The dashboard is read-only, so nothing was changed"
            remedy = "A change needs dq_web_read_only = False, or 'celery dq web --allow-changes'."
            return self.failed(Failure(405, "Read-only", reason, remedy))
        return super()._refusal()

    def post(self, request: HttpRequest) -> HttpResponseBase:
        """Ask, or make the change and show the page that follows."""
        dq, form = self.dq, request.POST
        page, query = self.back(form)
        user: Any = request.user
        name = user.get_username()
        # The permission is read here, because the connection to the database belongs to this thread.
        self.arguments = self.shows_arguments
        if "confirmed" not in form:
            asked = self.reads.change(lambda: self._check_and_preview(dq, form))
            if asked is not None:
                return self.rendered("confirm", {"asked": asked, "back": link_to(page, **query)})
        return self.done(form, self.reads.change(lambda: self._make_and_report(dq, form, name)))

    def done(self, form: QueryDict, sentence: str) -> HttpResponseBase:
        """Return the answer after the change: by default the page that follows, with the sentence."""
        page, query = self.back(form)
        notice = signing.dumps(sentence, salt=NOTICE)
        return HttpResponseRedirect(link_to(page, **query, notice=notice, undo=self.undo))

    def _check_and_preview(self, dq: DQ, form: QueryDict) -> Confirmation | None:
        self.refuse_unknown_queue(dq, form)
        return self.preview(dq, form)

    def _make_and_report(self, dq: DQ, form: QueryDict, user: str) -> str:
        """Make the change. It is logged and audited even if its answer comes too late for the page."""
        reason = form.get("audit_reason", "").strip()[:LONGEST_REASON]
        with dq.audit.through("dashboard", by=user, reason=reason):
            sentence = self.make(dq, form)
        logger.info(
            "%s used the dashboard: %s",
            user,
            sentence,
            extra={
                "event": "dashboard_change",
                "user": user,
                "change": self.permission,
                "queue": form.get("queue", ""),
                "tenant": form.get("tenant", ""),
            },
        )
        return sentence


def _finite(value: Any) -> Any:
    """Return a JSON value with null for an infinite number."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
