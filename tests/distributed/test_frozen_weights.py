from pathlib import Path
from processes import run_processes
BODY = """
from torch.nn.parallel import DistributedDataParallel
from lightning_fp8.modules.frozen_weight import FrozenWeight
def make(seed):
    torch.manual_seed(seed)
    m=nn.Sequential(nn.Linear(32,64),nn.Tanh(),nn.Linear(64,32),nn.Tanh(),nn.Linear(32,8))
    for p in m[:3].parameters(): p.requires_grad_(False)
    return m
def train(fw):
    m=convert(make(rank),frozen_weights=fw)
    d=DistributedDataParallel(m)
    opt=torch.optim.SGD(m.parameters(),lr=.1); L=[]
    for step in range(3):
        torch.manual_seed(10*step+rank)
        loss=d(torch.randn(8,32)).square().mean(); loss.backward(); scaling_state(m).update(); opt.step(); opt.zero_grad(); L.append(loss.item())
    return m,L
a,la=train("master"); b,lb=train("fp8")
result["la"],result["lb"]=la,lb
result["kind"]=type(b[0].weight).__name__
result["payload"]=b[0].weight.content.payload if isinstance(b[0].weight,FrozenWeight) else None
result["fp8"]=b[0].weight.is_fp8
"""
FS = """
from torch.distributed.fsdp import fully_shard
torch.manual_seed(0)
m=nn.Sequential(nn.Linear(32,64),nn.Tanh(),nn.Linear(64,32),nn.Tanh(),nn.Linear(32,8))
for p in m[:3].parameters(): p.requires_grad_(False)
convert(m,frozen_weights="fp8")
try:
    for l in (m[0],m[2],m): fully_shard(l)
    result["w"]=str(type(m[0].weight))
    y=m(torch.randn(4,32)); y.sum().backward()
except Exception as e:
    result["error"]=type(e).__name__+str(e)[:600]
"""

def test_a(tmp_path: Path) -> None:
    for r in run_processes(BODY,tmp_path): print({k:v if not hasattr(v,'shape') else v.long().sum() for k,v in r.items()})

def test_b(tmp_path: Path) -> None:
    print(run_processes(FS,tmp_path))
