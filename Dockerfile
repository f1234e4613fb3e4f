# The monitor as a container:  docker build -t verl-monitor:local .
# Both stages name the same Python, since a virtual environment only works with the interpreter that it was made for.

FROM python:3.11-slim-trixie AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY monitor ./monitor
COPY docs/runbooks ./docs/runbooks
# A wheel, not the tree: what is installed is then what a user of pip gets.
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .
RUN python -m venv --without-pip /opt/verl-monitor \
    && python -m pip --python /opt/verl-monitor install --no-cache-dir /wheels/*.whl

FROM python:3.11-slim-trixie
LABEL org.opencontainers.image.title="verl-monitor" \
      org.opencontainers.image.description="Training-health monitor for LLM reinforcement learning with verl" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/verl-monitor /opt/verl-monitor
# No byte code at run time: the root file system may be read-only, and pip has compiled everything. Unbuffered, so that
# a log line is there when the container is killed.
ENV PATH=/opt/verl-monitor/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
# A number, so that Kubernetes can tell that it is not root. 1000 is the first user of most machines; run it as the
# trainer's uid (see deploy/README.md), or the monitor cannot see who holds a log open.
USER 1000:1000
EXPOSE 9560
# Without a proxy: Docker hands the client's proxy settings to its containers, and urllib would use them for loopback.
HEALTHCHECK --interval=30s --timeout=5s --start-period=10s --retries=3 \
    CMD ["python", "-c", "from urllib.request import ProxyHandler, build_opener; build_opener(ProxyHandler({})).open('http://127.0.0.1:9560/-/healthy', timeout=4)"]
ENTRYPOINT ["verl-monitor"]
CMD ["serve", "--listen", "0.0.0.0:9560", "/logs"]
