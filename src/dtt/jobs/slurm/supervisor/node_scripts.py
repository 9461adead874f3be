"""The texts of the shells that start dtt: on the first node, and on every node."""

# Set-up runs in shells of its own: a line of it may fail, call `exit` or change the folder. After
# it, a program that is missing must end with bash's own 127, after which nothing is tried again.
SET_UP_FAILED = """
_dtt_failed() { echo "slurm: cannot set up $(hostname)" >&2; exit 78; }
trap _dtt_failed EXIT
"""
# Arguments: the code for every node, `bash`, a module, the arguments of the module.
FIRST_NODE = f"""{SET_UP_FAILED}
_dtt_prepare || exit
trap - EXIT
_dtt_launch bash -c "$@"
"""
EVERY_NODE = f"""
cd -- "$_dtt_directory" || exit 66
exec >>"$_dtt_job/logs/$_dtt_log-${{SLURMD_NODENAME:-$(hostname)}}.log" 2>&1
{SET_UP_FAILED}
_dtt_set_up || exit
cd -- "$_dtt_directory" || exit
trap - EXIT
"""
# Slurm sends its signals to the launcher, too. torchrun would die of SIGUSR1 and SIGUSR2, and of
# SIGTERM before the ranks have saved. Ignored signals stay ignored after exec; ranks install their
# own handlers.
# A first node whose name does not resolve is reached by the address that srun knows.
RANKS = """
trap '' USR1 USR2 TERM
getent hosts "$_dtt_host" >/dev/null || _dtt_host=$SLURM_LAUNCH_NODE_IPADDR
"""
